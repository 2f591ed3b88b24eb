"""An episode in Python and what it needs: state as bytes, external calls, conversion to messages, errors, timing."""
