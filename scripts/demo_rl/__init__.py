"""The demo: reinforcement learning on Ray, with samplers that follow the trainer bit for bit."""
