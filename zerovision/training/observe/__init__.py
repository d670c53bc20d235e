"""What a training reports: logs, measurements, heartbeats, the files of a run."""
