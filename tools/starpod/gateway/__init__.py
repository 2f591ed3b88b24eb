"""The model gateway: OpenAI's and Anthropic's APIs in front of an engine, with a record of each session's tokens."""
