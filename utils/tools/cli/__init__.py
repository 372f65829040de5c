"""The command `ddpkit` itself, and what all its commands share."""
