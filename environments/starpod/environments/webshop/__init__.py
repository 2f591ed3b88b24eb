"""WebShop without a browser: a catalogue, a search that ranks as Lucene does, goals, a graded reward, and pages."""
