"""Operations on many jobs: bulk operations, the mirror in the tables, restores, schedules."""
