"""Find out what is wrong with a job; ddpkit doctor."""
