"""The learner: from claimed batches to new weights. `main` is the process, `loop` the page to read first."""
