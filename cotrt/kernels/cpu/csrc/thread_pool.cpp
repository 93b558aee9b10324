#include "thread_pool.h"

#include <fstream>
#include <string>

#if defined(__linux__)
#include <pthread.h>
#include <sched.h>
#include <unistd.h>
#endif
#if defined(__x86_64__) || defined(_M_X64)
#include <immintrin.h>
#endif

namespace cotrt {
namespace {

inline void relax() {
#if defined(__x86_64__) || defined(_M_X64)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// About 30 to 60 microseconds: longer than two threads are apart at the end of a phase, far
// shorter than a time slice.
constexpr int kSpins = 1500;

}  // namespace

ThreadPool::ThreadPool(int num_threads) : num_threads_(num_threads < 1 ? 1 : num_threads) {
  for (int t = 1; t < num_threads_; ++t) workers_.emplace_back([this, t] { worker(t); });
}

ThreadPool::~ThreadPool() {
  {
    std::lock_guard<std::mutex> lock(sleep_mutex_);
    stop_.store(true);
  }
  wake_.notify_all();
  for (std::thread& t : workers_) t.join();
}

void ThreadPool::publish(uint64_t chunks) {
  const uint64_t phase = phase_count_.load(std::memory_order_relaxed) + 1;
  ticket_.store((phase << (2 * kIndexBits)) | (chunks << kIndexBits), std::memory_order_release);
  phase_count_.store(phase, std::memory_order_seq_cst);
  if (sleepers_.load(std::memory_order_seq_cst) > 0) {
    { std::lock_guard<std::mutex> lock(sleep_mutex_); }
    wake_.notify_all();
  }
}

void ThreadPool::advance(int phase, int thread) {
  for (;;) {
    if (++phase == work_->num_phases()) {
      finished_.store(true, std::memory_order_release);
      publish(0);
      return;
    }
    const int chunks = work_->num_chunks(phase);
    if (chunks == 0) continue;
    if (chunks == 1 || num_threads_ == 1) {
      for (int c = 0; c < chunks; ++c) work_->run(phase, c, thread);
      continue;
    }
    phase_ = phase;
    chunks_ = chunks;
    done_.store(0, std::memory_order_relaxed);
    publish(uint64_t(chunks));
    return;
  }
}

void ThreadPool::drain(int thread) {
  for (;;) {
    uint64_t t = ticket_.load(std::memory_order_acquire);
    if ((t & kIndexMask) >= ((t >> kIndexBits) & kIndexMask)) return;
    t = ticket_.fetch_add(1, std::memory_order_acq_rel);
    const uint64_t index = t & kIndexMask, chunks = (t >> kIndexBits) & kIndexMask;
    if (index >= chunks) return;
    const int phase = phase_;
    work_->run(phase, int(index), thread);
    if (done_.fetch_add(1, std::memory_order_acq_rel) + 1 == int(chunks)) advance(phase, thread);
  }
}

void ThreadPool::wait_for_change(uint64_t seen) {
  for (int i = 0; i < kSpins; ++i) {
    if (phase_count_.load(std::memory_order_acquire) != seen) return;
    relax();
  }
  std::unique_lock<std::mutex> lock(sleep_mutex_);
  sleepers_.fetch_add(1, std::memory_order_seq_cst);
  wake_.wait(lock, [&] {
    return phase_count_.load(std::memory_order_seq_cst) != seen || stop_.load();
  });
  sleepers_.fetch_sub(1, std::memory_order_seq_cst);
}

void ThreadPool::worker(int thread) {
  while (!stop_.load(std::memory_order_relaxed)) {
    const uint64_t seen = phase_count_.load(std::memory_order_acquire);
    drain(thread);
    wait_for_change(seen);
  }
}

void ThreadPool::run(Work& work) {
  std::lock_guard<std::mutex> lock(run_mutex_);
  work_ = &work;
  finished_.store(false, std::memory_order_relaxed);
  advance(-1, 0);
  for (;;) {
    const uint64_t seen = phase_count_.load(std::memory_order_acquire);
    drain(0);
    if (finished_.load(std::memory_order_acquire)) break;
    wait_for_change(seen);
    if (finished_.load(std::memory_order_acquire)) break;
  }
}

int default_num_threads() {
  int n = int(std::thread::hardware_concurrency());
#if defined(__linux__)
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof(set), &set) == 0) n = CPU_COUNT(&set);
  // A container's quota, rounded up.
  std::ifstream quota("/sys/fs/cgroup/cpu.max");
  std::string limit;
  double period = 0;
  if (quota >> limit >> period && limit != "max" && period > 0) {
    const int cores = int((std::stod(limit) + period - 1) / period);
    if (cores >= 1 && cores < n) n = cores;
  }
#endif
  return n < 1 ? 1 : n;
}

namespace {
// Never destroyed: at exit the workers are asleep, and joining them could only hang.
struct Shared {
  std::mutex mutex;
  std::shared_ptr<ThreadPool> pool;
  int num_threads = 0;
};
Shared* shared = new Shared;

#if defined(__linux__)
// A forked child has no workers: it leaves its parent's pool alone and makes its own.
void forget_pool() {
  const int n = shared->num_threads;
  shared = new Shared;
  shared->num_threads = n;
}
const int fork_hook = pthread_atfork(nullptr, nullptr, forget_pool);
#endif
}  // namespace

std::shared_ptr<ThreadPool> thread_pool() {
#if defined(__linux__)
  (void)fork_hook;
#endif
  std::lock_guard<std::mutex> lock(shared->mutex);
  if (!shared->pool)
    shared->pool = std::make_shared<ThreadPool>(shared->num_threads ? shared->num_threads
                                                                    : default_num_threads());
  return shared->pool;
}

void set_num_threads(int n) {
  std::lock_guard<std::mutex> lock(shared->mutex);
  shared->num_threads = n;
  if (shared->pool && shared->pool->num_threads() != n) shared->pool.reset();
}

}  // namespace cotrt
