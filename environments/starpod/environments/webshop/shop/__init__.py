"""The shop itself: what a session sees and does, and what a purchase is worth."""
