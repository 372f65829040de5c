"""Find out what is wrong with a job; scripts/doctor.py."""
