"""What a session is and does: calls of the contract, and what bounds them."""
