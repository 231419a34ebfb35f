"""A training service for many clients: the Tinker API over one base model (docs/training-service.md)."""
