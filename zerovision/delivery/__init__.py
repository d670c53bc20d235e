"""What turns a finished run into something used."""
