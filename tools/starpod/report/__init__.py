"""Charts, pages, figures and consoles that several tools share. Imports no other component."""
