"""The live site: runs, episodes and fleets in a browser. It reads the files of runs through an index, for speed."""
