// @platformatic/job-queue on Redis (`fill COUNT`, `work CONCURRENCY`) or in memory (`both COUNT CONCURRENCY`).
import { MemoryStorage, Queue, RedisStorage } from '@platformatic/job-queue'
import { action, connection, mark, payloads, slots } from './mark.mjs'

const inMemory = action === 'both'
const storage = inMemory ? new MemoryStorage() : new RedisStorage({ url: `redis://127.0.0.1:${connection.port}` })
const concurrency = inMemory ? Number(process.argv[4]) : slots

async function fill () {
  const entries = payloads()
  for (let start = 0; start < entries.length; start += 100) {
    await Promise.all(entries.slice(start, start + 100).map(entry => queue.enqueue(`job-${entry.n}`, entry)))
  }
}

const queue = new Queue({ storage, concurrency })
await queue.start()
if (action !== 'work') await fill()
if (action === 'fill') {
  await queue.stop()
} else {
  queue.execute(async () => {
    mark()
    return { ok: true }
  })
}
