"""vLLM as the engine: its server, what is added to it, and the clients of the rest of the house."""
