"""The live site: runs, episodes and fleets in a browser. An index makes it fast; the files are the truth."""
