"""WebShop without a browser: catalogue, search with Lucene's ranking, goals, graded reward, and pages."""
