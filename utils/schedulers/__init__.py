"""What a batch scheduler allocated to this job. One file per scheduler; standard library only."""
