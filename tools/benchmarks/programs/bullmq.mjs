// BullMQ on Redis: `fill COUNT`, `pickup COUNT` or `work CONCURRENCY`.
import { Queue, Worker } from 'bullmq'
import { action, connection, mark, markTime, payloads, pickup, slots } from './mark.mjs'

if (action === 'fill') {
  const queue = new Queue('bench', { connection })
  const entries = payloads().map(data => ({ name: 'touch', data }))
  for (let start = 0; start < entries.length; start += 1000) {
    await queue.addBulk(entries.slice(start, start + 1000))
  }
  await queue.close()
} else if (action === 'pickup') {
  const queue = new Queue('bench', { connection })
  await pickup(data => queue.add('timed', data))
  await queue.close()
} else {
  const handler = async job => {
    if (job.name === 'timed') markTime(job.data.at)
    else mark()
    return { ok: true }
  }
  const worker = new Worker('bench', handler, { connection, concurrency: slots })
  worker.on('error', error => console.error(error))
}
