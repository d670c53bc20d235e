"""How training state is sharded, and who updates it."""
