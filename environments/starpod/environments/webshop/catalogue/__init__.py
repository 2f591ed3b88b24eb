"""Products, prices and goals, read from the original WebShop's files or generated."""
