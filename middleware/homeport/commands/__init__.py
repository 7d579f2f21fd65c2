"""What is behind the commands that are more than a call: from what is typed to what is done."""
