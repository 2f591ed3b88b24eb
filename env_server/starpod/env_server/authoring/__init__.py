"""The base class of environments, chat models that they ask, and drawing: modules for authors."""
