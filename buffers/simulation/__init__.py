"""The buffer's state machine played in virtual time, to say beforehand what settings give. A process: `main`."""
