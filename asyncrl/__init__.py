"""asyncrl: asynchronous, disaggregated reinforcement learning for language models on message queues.

What a user imports lives here. Importing this package imports no torch, no redis and no engine.
"""

__version__ = "0.1.0"
