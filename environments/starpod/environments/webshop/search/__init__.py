"""Text processing for search and reward: words, terms, nouns, and an index with BM25 ranking."""
