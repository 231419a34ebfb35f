"""Where the buffer keeps its index: `sqlite` (embedded) or `redis`; both pass one contract suite."""
