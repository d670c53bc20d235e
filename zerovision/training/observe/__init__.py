"""The reports of a training: logs, measurements, heartbeats, and the files of a run."""
