"""What do batch shares gain where workers are unequal? See README.md."""
