"""search_qa-v1: questions over several articles of a small encyclopedia, with a search engine."""

from .environment import SearchQA, SearchQAOptions

__all__ = ["SearchQA", "SearchQAOptions"]
