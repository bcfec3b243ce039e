// BullMQ on Redis: `fill COUNT` or `work CONCURRENCY`.
import { Queue, Worker } from 'bullmq'
import { action, connection, mark, payloads, slots } from './mark.mjs'

if (action === 'fill') {
  const queue = new Queue('bench', { connection })
  const entries = payloads().map(data => ({ name: 'touch', data }))
  for (let start = 0; start < entries.length; start += 1000) {
    await queue.addBulk(entries.slice(start, start + 1000))
  }
  await queue.close()
} else {
  const handler = async () => {
    mark()
    return { ok: true }
  }
  const worker = new Worker('bench', handler, { connection, concurrency: slots })
  worker.on('error', error => console.error(error))
}
