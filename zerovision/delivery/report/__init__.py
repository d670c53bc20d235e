"""One page that shows a run, or several side by side: a single HTML file that needs no network."""
