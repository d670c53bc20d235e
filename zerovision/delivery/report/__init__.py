"""Writes a report that shows one run, or several side by side, in a single HTML file that needs no network."""
