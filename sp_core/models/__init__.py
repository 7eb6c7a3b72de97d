"""Models that the host lacks, built from the host's parts. Only the modules that need the host import it."""
