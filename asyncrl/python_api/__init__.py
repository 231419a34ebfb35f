"""The Python door: `asyncrl.train`, `asyncrl.launch`, `asyncrl.Config` and `asyncrl.Run` live here."""
