"""What the commands are made of; nothing in the library imports it."""
