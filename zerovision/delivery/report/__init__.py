"""Writes a report that shows one run, or several runs side by side, in a single HTML file that works offline."""
