"""Tags for the dashboard's templates."""
