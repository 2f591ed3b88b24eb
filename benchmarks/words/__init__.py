"""How well the words of the project are understood."""
