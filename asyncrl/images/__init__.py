"""Images of prompts: reading and keeping them, and what a vision-language model gets of them."""
