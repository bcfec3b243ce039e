-- Move a restore on to its next phase, unless another process has taken it over.
--
-- ARGV: 1 the time, the name of the restore, its next phase ('' to end it).
-- restore  the name of the restore, its phase, its queues, and what belongs to no queue
-- Returns 1, or 0 if there is another restore, or none.
--! keys restore

if redis.call('HGET', RESTORE, 'name') ~= ARGV[2] then return 0 end
if ARGV[3] == '' then redis.call('UNLINK', RESTORE) else redis.call('HSET', RESTORE, 'phase', ARGV[3]) end
return 1
