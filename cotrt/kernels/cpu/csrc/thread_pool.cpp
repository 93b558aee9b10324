#include "thread_pool.h"

#include <chrono>
#include <fstream>
#include <string>

#if defined(__linux__)
#include <pthread.h>
#include <sched.h>
#include <sys/syscall.h>
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

// A chunk takes some 20 microseconds: who waits for one this long waits for a thread without a core.
constexpr std::chrono::microseconds kPatience{200};

int current_thread_id() {
#if defined(__linux__)
  return int(syscall(SYS_gettid));
#else
  return 0;
#endif
}

}  // namespace

ThreadPool::ThreadPool(int num_threads)
    : num_threads_(num_threads < 1 ? 1 : num_threads), states_(size_t(num_threads_)) {
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
  leave_shared_core(thread);
  for (;;) {
    uint64_t t = ticket_.load(std::memory_order_acquire);
    if ((t & kIndexMask) >= ((t >> kIndexBits) & kIndexMask)) return;
    t = ticket_.fetch_add(1, std::memory_order_acq_rel);
    const uint64_t index = t & kIndexMask, chunks = (t >> kIndexBits) & kIndexMask;
    if (index >= chunks) return;
    const int phase = phase_;
    std::atomic<bool>& holds = states_[size_t(thread)].holds;
    holds.store(true, std::memory_order_relaxed);
    work_->run(phase, int(index), thread);
    holds.store(false, std::memory_order_relaxed);
    if (done_.fetch_add(1, std::memory_order_acq_rel) + 1 == int(chunks)) advance(phase, thread);
  }
}

void ThreadPool::leave_shared_core(int thread) {
#if defined(__linux__)
  ThreadState& own = states_[size_t(thread)];
  const int cpu = sched_getcpu();
  own.cpu.store(cpu, std::memory_order_relaxed);
  bool shared = false;
  for (int t = 0; t < thread; ++t)
    shared = shared || states_[size_t(t)].cpu.load(std::memory_order_relaxed) == cpu;
  if (!shared || cpu < 0 || cpu >= CPU_SETSIZE) return;
  const auto now = std::chrono::steady_clock::now();
  if (now - own.moved < std::chrono::milliseconds(4)) return;
  own.moved = now;
  cpu_set_t allowed, others;
  if (sched_getaffinity(0, sizeof(allowed), &allowed)) return;
  others = allowed;
  for (int t = 0; t < num_threads_; ++t) {
    const int used = states_[size_t(t)].cpu.load(std::memory_order_relaxed);
    if (t != thread && used >= 0 && used < CPU_SETSIZE) CPU_CLR(used, &others);
  }
  if (CPU_COUNT(&others) == 0) return;
  sched_setaffinity(0, sizeof(others), &others);
  sched_setaffinity(0, sizeof(allowed), &allowed);
  own.cpu.store(sched_getcpu(), std::memory_order_relaxed);
#else
  (void)thread;
#endif
}

void ThreadPool::call_holders(int thread) {
#if defined(__linux__)
  const int cpu = sched_getcpu();
  if (cpu < 0 || cpu >= CPU_SETSIZE) return;
  cpu_set_t here, allowed;
  CPU_ZERO(&here);
  CPU_SET(cpu, &here);
  for (int t = 0; t < num_threads_; ++t) {
    const int id = states_[size_t(t)].id.load(std::memory_order_relaxed);
    if (t == thread || !id || !states_[size_t(t)].holds.load(std::memory_order_relaxed)) continue;
    if (sched_getaffinity(id, sizeof(allowed), &allowed) || !CPU_ISSET(cpu, &allowed)) continue;
    sched_setaffinity(id, sizeof(here), &here);
    sched_setaffinity(id, sizeof(allowed), &allowed);
    return;  // one a core
  }
#else
  (void)thread;
#endif
}

void ThreadPool::wait_for_change(uint64_t seen, int thread) {
  for (int i = 0; i < kSpins; ++i) {
    if (phase_count_.load(std::memory_order_acquire) != seen) return;
    relax();
  }
  std::unique_lock<std::mutex> lock(sleep_mutex_);
  sleepers_.fetch_add(1, std::memory_order_seq_cst);
  const auto changed = [&] {
    return phase_count_.load(std::memory_order_seq_cst) != seen || stop_.load();
  };
  while (!wake_.wait_for(lock, kPatience, changed)) {
    // Between steps nobody holds a chunk, and nothing is to be done but wait.
    if (finished_.load(std::memory_order_acquire)) {
      wake_.wait(lock, changed);
      break;
    }
    call_holders(thread);
  }
  sleepers_.fetch_sub(1, std::memory_order_seq_cst);
}

void ThreadPool::worker(int thread) {
  states_[size_t(thread)].id.store(current_thread_id(), std::memory_order_relaxed);
  while (!stop_.load(std::memory_order_relaxed)) {
    const uint64_t seen = phase_count_.load(std::memory_order_acquire);
    drain(thread);
    wait_for_change(seen, thread);
  }
}

void ThreadPool::run(Work& work) {
  std::lock_guard<std::mutex> lock(run_mutex_);
  states_[0].id.store(current_thread_id(), std::memory_order_relaxed);
  work_ = &work;
  finished_.store(false, std::memory_order_relaxed);
  advance(-1, 0);
  for (;;) {
    const uint64_t seen = phase_count_.load(std::memory_order_acquire);
    drain(0);
    if (finished_.load(std::memory_order_acquire)) break;
    wait_for_change(seen, 0);
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
