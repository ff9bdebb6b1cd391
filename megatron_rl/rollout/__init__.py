"""Prompts to rollouts: the environment protocol, the environments, and the loop that runs them token in, token out."""
