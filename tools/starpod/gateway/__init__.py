"""The model gateway: OpenAI's and Anthropic's APIs in front of an engine, the tokens of sessions kept."""
