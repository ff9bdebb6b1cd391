"""New weights from the trainer into running engines: versioned, checksummed, all or nothing."""
