// A small pool of threads that runs phases of chunks without barriers.
//
// A Work is a list of phases; a phase is a number of chunks that may run in any order. Threads
// claim chunks one by one, and a phase is over when its chunks are done, not when all threads have
// arrived: a thread that the host took off its core holds up nobody but the chunk in its hands.
// Who finishes the last chunk opens the next phase (and runs phases of one chunk itself). Threads
// with nothing to claim spin for some tens of microseconds, then sleep. One that still waits for a
// chunk after that calls its holder, which waits for a core, to the core that it leaves itself.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace cotrt {

class Work {
 public:
  virtual ~Work() = default;
  virtual int num_phases() const = 0;
  // Called once a phase, before its first chunk.
  virtual int num_chunks(int phase) = 0;
  virtual void run(int phase, int chunk, int thread) = 0;
};

class ThreadPool {
 public:
  explicit ThreadPool(int num_threads);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int num_threads() const { return num_threads_; }
  // Runs all phases; the calling thread works too. One caller at a time, others wait.
  void run(Work& work);

 private:
  // phase number (20 bits) | chunks in it (22) | next chunk to claim (22)
  static constexpr int kIndexBits = 22;
  static constexpr uint64_t kIndexMask = (uint64_t(1) << kIndexBits) - 1;

  void worker(int thread);
  // Claims and runs chunks until the open phase has none left to claim.
  void drain(int thread);
  // Opens the phases after `phase` that are ready; runs single chunks in place.
  void advance(int phase, int thread);
  void publish(uint64_t chunks);
  void wait_for_change(uint64_t seen_phase, int thread);
  // Moves off a core that a sibling uses: beside a busy thread of somebody else's, the system
  // thinks two of ours on one core well placed.
  void leave_shared_core(int thread);
  // Moves a thread that holds a chunk to this core; it may go anywhere again afterwards.
  void call_holders(int thread);

  struct alignas(64) ThreadState {
    std::atomic<int> id{0};         // the system's id of the thread
    std::atomic<bool> holds{false};  // a chunk is in its hands
    std::atomic<int> cpu{-1};        // where it was seen last
    std::chrono::steady_clock::time_point moved{};
  };

  int num_threads_;
  std::vector<ThreadState> states_;
  std::vector<std::thread> workers_;
  std::mutex run_mutex_;

  alignas(64) std::atomic<uint64_t> ticket_{0};
  alignas(64) std::atomic<int> done_{0};
  alignas(64) std::atomic<uint64_t> phase_count_{0};
  std::atomic<int> sleepers_{0};
  std::atomic<bool> finished_{true};
  std::atomic<bool> stop_{false};
  std::mutex sleep_mutex_;
  std::condition_variable wake_;
  Work* work_ = nullptr;  // these two are stable while a chunk of the open phase is not done
  int phase_ = 0;
  int chunks_ = 0;
};

// The pool of this process (made anew after a fork), and its size.
std::shared_ptr<ThreadPool> thread_pool();
void set_num_threads(int n);
int default_num_threads();

// fn(chunk, thread) for chunks [0, n).
template <class Fn>
void parallel_for(int n, Fn fn) {
  struct OnePhase final : Work {
    int n;
    Fn& fn;
    OnePhase(int n_, Fn& fn_) : n(n_), fn(fn_) {}
    int num_phases() const override { return 1; }
    int num_chunks(int) override { return n; }
    void run(int, int chunk, int thread) override { fn(chunk, thread); }
  } work(n, fn);
  thread_pool()->run(work);
}

}  // namespace cotrt
