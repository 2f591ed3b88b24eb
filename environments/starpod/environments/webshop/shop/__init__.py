"""The shop itself: its pages, its actions and the reward of a purchase."""
