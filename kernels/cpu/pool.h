// The threads that walk a program together.
#pragma once
#include <stddef.h>
#include <stdint.h>

#include <atomic>

#include "kernels.h"

namespace llmr {

constexpr int MAX_WORKERS = 256;

struct Job {
  const llmr_instr *program;
  int length;
  const llmr_step *step;
};

// What all workers of a pool share. Words that different threads write lie on different lines.
struct Shared {
  alignas(64) std::atomic<uint32_t> arrived{0};
  alignas(64) std::atomic<uint32_t> phase{0};    // counts barriers; sleepers wait for it to change
  alignas(64) std::atomic<int32_t> next{0};      // chunk counter of Worker::take
  alignas(64) std::atomic<uint32_t> sleepers{0};
  alignas(64) std::atomic<uint32_t> longest_wait_us{0};  // of the caller, in this job
  alignas(64) std::atomic<uint32_t> lock{0};
  uint8_t *memory = nullptr;
  size_t memory_bytes = 0;
};

// What all workers do in one job; it ends behind a barrier.
using Task = void (*)(Worker &, const void *what);

// N - 1 threads beside the caller. Not thread-safe: one job at a time.
class Pool {
 public:
  // nullptr if memory or threads cannot be had.
  static Pool *create(int n_workers, const Kernels *kernels);
  ~Pool();

  // Runs a program with at most `most` workers and returns when it is done.
  void run(const Job &job, int most);

  // Reads memory once.
  void read(const void *memory, uint64_t bytes);

  int size() const { return n_; }

  // Another process on our cores makes every barrier wait for its time slice. The pool then
  // works with fewer threads for a while and tries again; the results are the same.
  int active() const { return active_; }

 private:
  Pool() = default;
  struct Thread;
  static void *main(void *thread);
  void start(int active);
  void work(Worker &worker);
  void watch_neighbours(int n_tokens);

  int n_ = 1;
  int active_ = 1;
  bool woke_ = false;  // threads slept when the present job began
  Worker *workers_ = nullptr;
  Thread *threads_ = nullptr;
  Shared shared_;
  Task task_ = nullptr;
  const void *what_ = nullptr;
  alignas(64) std::atomic<uint32_t> turn_{0};  // which job, and how many take part
  alignas(64) std::atomic<uint32_t> parked_{0};
  alignas(64) std::atomic<uint32_t> crew_{MAX_WORKERS};  // so many take part at present; the others sleep
  std::atomic<bool> leaving_{false};
  int most_ = 1;              // so many may take part at present
  int tried_from_ = 0;        // what most_ was before a try that is not over; 0: none
  int stalls_ = 0;            // jobs in which somebody had to wait long, of late
  int64_t retry_us_ = 0;      // when to try with all again
  int64_t pause_us_ = 0;      // how long the last try was put off
};

int64_t now_us();

}  // namespace llmr
