#include "pool.h"

#include <pthread.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include <new>

#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#endif
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace llmr {
namespace {

constexpr uint32_t TURN = 1 << 9;     // Pool::turn_ = jobs * TURN + workers that take part
constexpr int64_t SPIN_US = 50;      // at a barrier: a wake-up costs about as much
constexpr int64_t HOT_US = 1000;     // between jobs: longer than what lies between two tokens
constexpr int64_t STALL_US = 300;    // a barrier that waits longer has lost its core to somebody
constexpr int64_t LONG_STALL_US = 3000;  // the same where one chunk of work takes a millisecond
constexpr int64_t FIRST_PAUSE_US = 50'000, LONGEST_PAUSE_US = 2'000'000;

void relax() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  __asm__ volatile("yield");
#endif
}

#if defined(__linux__)
void sleep_while(std::atomic<uint32_t> &word, uint32_t value) {
  syscall(SYS_futex, reinterpret_cast<uint32_t *>(&word), FUTEX_WAIT_PRIVATE, value, nullptr, nullptr, 0);
}
void wake_all(std::atomic<uint32_t> &word) {
  syscall(SYS_futex, reinterpret_cast<uint32_t *>(&word), FUTEX_WAKE_PRIVATE, MAX_WORKERS, nullptr, nullptr, 0);
}
#else
// Elsewhere a short sleep stands in for a futex: a parked thread looks again every millisecond.
void sleep_while(std::atomic<uint32_t> &word, uint32_t value) {
  struct timespec nap = {0, 1'000'000};
  if (word.load(std::memory_order_acquire) == value) nanosleep(&nap, nullptr);
}
void wake_all(std::atomic<uint32_t> &) {}
#endif

// Waits until `word` is no longer `value`: spins for spin_us, gives the core away a few times,
// sleeps. Returns the microseconds it took, 0 if it never looked at the clock.
int64_t await(std::atomic<uint32_t> &word, uint32_t value, int64_t spin_us, std::atomic<uint32_t> &sleepers) {
  for (int i = 0; i < 64; i++) {
    if (word.load(std::memory_order_acquire) != value) return 0;
    relax();
  }
  const int64_t start = now_us();
  int64_t waited = 0;
  while (waited < spin_us) {
    for (int i = 0; i < 32; i++) {
      if (word.load(std::memory_order_acquire) != value) return waited;
      relax();
    }
    waited = now_us() - start;
  }
  for (int i = 0; i < 3; i++) {
    sched_yield();
    if (word.load(std::memory_order_acquire) != value) return now_us() - start;
  }
  sleepers.fetch_add(1, std::memory_order_seq_cst);
  while (word.load(std::memory_order_seq_cst) == value) sleep_while(word, value);
  sleepers.fetch_sub(1, std::memory_order_relaxed);
  return now_us() - start;
}

// Sub-normal numbers are slow and mean nothing here; every worker computes with the same rule.
class FlushToZero {
 public:
#if defined(__x86_64__)
  FlushToZero() : before_(_mm_getcsr()) { _mm_setcsr(before_ | 0x8040); }
  ~FlushToZero() { _mm_setcsr(before_); }

 private:
  unsigned before_;
#elif defined(__aarch64__)
  FlushToZero() {
    __asm__ volatile("mrs %0, fpcr" : "=r"(before_));
    __asm__ volatile("msr fpcr, %0" ::"r"(before_ | (1ull << 24)));
  }
  ~FlushToZero() { __asm__ volatile("msr fpcr, %0" ::"r"(before_)); }

 private:
  uint64_t before_;
#endif
};

const Op OPS[LLMR_N_OPS] = {op_embed,      op_norm_linear,  op_rope_append, op_attend,
                            op_linear_add, op_norm_gate_up, op_moe_add,     op_norm_head};

}  // namespace

int64_t now_us() {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec * 1'000'000ll + t.tv_nsec / 1000;
}

// ---- what ops see ---------------------------------------------------------------------------------

void Worker::barrier() {
  Shared &s = *shared;
  if (n == 1) {
    s.next.store(0, std::memory_order_relaxed);
    return;
  }
  const uint32_t phase = s.phase.load(std::memory_order_relaxed);
  const uint32_t all = static_cast<uint32_t>(n);  // once arrived, n may be the next job's already
  const bool is_caller = id == 0;
  if (s.arrived.fetch_add(1, std::memory_order_acq_rel) + 1 == all) {
    s.arrived.store(0, std::memory_order_relaxed);
    s.next.store(0, std::memory_order_relaxed);
    s.phase.store(phase + 1, std::memory_order_seq_cst);
    if (s.sleepers.load(std::memory_order_seq_cst)) wake_all(s.phase);
    return;
  }
  const int64_t waited = await(s.phase, phase, SPIN_US, s.sleepers);
  if (is_caller && waited > s.longest_wait_us.load(std::memory_order_relaxed))
    s.longest_wait_us.store(static_cast<uint32_t>(waited), std::memory_order_relaxed);
}

int Worker::take() { return shared->next.fetch_add(1, std::memory_order_relaxed); }

uint8_t *Worker::common(size_t bytes) {
  Shared &s = *shared;
  uint32_t open = 0;
  while (!s.lock.compare_exchange_weak(open, 1, std::memory_order_acquire)) {
    open = 0;
    relax();
  }
  if (s.memory_bytes < bytes) {
    free(s.memory);
    const size_t rounded = (bytes + (bytes >> 2) + 4095) & ~static_cast<size_t>(4095);
    s.memory = static_cast<uint8_t *>(aligned_alloc(4096, rounded));
    if (s.memory == nullptr) {
      fprintf(stderr, "llmrun: %zu bytes of working memory could not be had\n", rounded);
      abort();  // in the middle of an op that others share: there is no way on
    }
    s.memory_bytes = rounded;
  }
  uint8_t *memory = s.memory;
  s.lock.store(0, std::memory_order_release);
  return memory;
}

// ---- the pool -------------------------------------------------------------------------------------

struct Pool::Thread {
  Pool *pool;
  int id;
  pthread_t handle;
  bool running;
};

Pool *Pool::create(int n_workers, const Kernels *kernels) {
  void *memory = nullptr;
  if (posix_memalign(&memory, 64, sizeof(Pool)) != 0) return nullptr;
  Pool *pool = new (memory) Pool;
  pool->n_ = n_workers < 1 ? 1 : n_workers > MAX_WORKERS ? MAX_WORKERS : n_workers;
  pool->most_ = pool->n_;
  pool->workers_ = static_cast<Worker *>(calloc(pool->n_, sizeof(Worker)));
  pool->threads_ = static_cast<Thread *>(calloc(pool->n_, sizeof(Thread)));
  bool ok = pool->workers_ != nullptr && pool->threads_ != nullptr;
  for (int id = 0; ok && id < pool->n_; id++) {
    Worker &worker = pool->workers_[id];
    worker = {id, 1, kernels, static_cast<uint8_t *>(aligned_alloc(4096, SCRATCH)), &pool->shared_};
    ok = worker.scratch != nullptr;
    if (!ok || id == 0) continue;
    Thread &thread = pool->threads_[id];
    thread.pool = pool;
    thread.id = id;
    thread.running = ok = pthread_create(&thread.handle, nullptr, main, &thread) == 0;
  }
  if (ok) return pool;
  pool->~Pool();
  free(memory);
  return nullptr;
}

Pool::~Pool() {
  leaving_.store(true);
  turn_.fetch_add(1, std::memory_order_seq_cst);
  crew_.store(MAX_WORKERS, std::memory_order_seq_cst);
  wake_all(turn_);
  wake_all(crew_);
  for (int id = 1; threads_ != nullptr && id < n_; id++)
    if (threads_[id].running) pthread_join(threads_[id].handle, nullptr);
  for (int id = 0; workers_ != nullptr && id < n_; id++) free(workers_[id].scratch);
  free(workers_);
  free(threads_);
  free(shared_.memory);
}

void *Pool::main(void *argument) {
  const Thread &thread = *static_cast<Thread *>(argument);
  Pool &pool = *thread.pool;
  FlushToZero rule;
  uint32_t seen = 0;
  for (;;) {
    await(pool.turn_, seen, HOT_US, pool.parked_);
    seen = pool.turn_.load(std::memory_order_acquire);
    if (pool.leaving_.load(std::memory_order_relaxed)) return nullptr;
    // The word itself says how many take part: whoever does keeps the job alive by its barriers.
    if (thread.id < static_cast<int>(seen % TURN)) pool.work(pool.workers_[thread.id]);
    // Left out, it must not wake up for every job that goes by, or it takes the time of those who work.
    for (uint32_t crew = pool.crew_.load(std::memory_order_seq_cst); thread.id >= static_cast<int>(crew);
         crew = pool.crew_.load(std::memory_order_seq_cst))
      sleep_while(pool.crew_, crew);
  }
}

void Pool::work(Worker &worker) { task_(worker, what_); }

// Does task_ with so many workers, the caller one of them.
void Pool::start(int active) {
  FlushToZero rule;
  active_ = active;
  shared_.longest_wait_us.store(0, std::memory_order_relaxed);
  shared_.next.store(0, std::memory_order_relaxed);
  for (int id = 0; id < active; id++) workers_[id].n = active;
  woke_ = false;
  if (active > 1) {
    woke_ = parked_.load(std::memory_order_relaxed) != 0;
    if (crew_.load(std::memory_order_relaxed) != static_cast<uint32_t>(active)) {
      crew_.store(static_cast<uint32_t>(active), std::memory_order_seq_cst);
      wake_all(crew_);
      woke_ = true;
    }
    const uint32_t jobs = turn_.load(std::memory_order_relaxed) / TURN + 1;
    turn_.store(jobs * TURN + static_cast<uint32_t>(active), std::memory_order_seq_cst);
    if (parked_.load(std::memory_order_seq_cst)) wake_all(turn_);
  }
  work(workers_[0]);
}

void Pool::run(const Job &job, int most) {
  if (job.length < 1) return;  // without a barrier nobody would wait for the workers to read the job
  const int wanted = most < 1 || most > n_ ? n_ : most;
  task_ = [](Worker &worker, const void *what) {
    const Job job = *static_cast<const Job *>(what);  // a copy: behind the last barrier the caller is gone
    for (int i = 0; i < job.length; i++) {
      OPS[job.program[i].op](worker, job.program[i], *job.step);
      worker.barrier();
    }
  };
  what_ = &job;
  start(wanted < most_ ? wanted : most_);
  if (wanted > 1) watch_neighbours(job.step->n_tokens);
}

void Pool::read(const void *memory, uint64_t bytes) {
  struct Work {
    const uint8_t *memory;
    uint64_t bytes;
  } work = {static_cast<const uint8_t *>(memory), bytes};
  task_ = [](Worker &worker, const void *what) {
    const Work &work = *static_cast<const Work *>(what);
    constexpr uint64_t BLOCK = 1 << 20;
    uint64_t sum = 0;
    for (uint64_t at = worker.take() * BLOCK; at + BLOCK <= work.bytes; at = worker.take() * BLOCK) {
      const uint64_t *words = reinterpret_cast<const uint64_t *>(work.memory + at);
      for (uint64_t i = 0; i < BLOCK / 8; i += 8)  // a word of each cache line is enough
        sum += words[i];
    }
    *reinterpret_cast<volatile uint64_t *>(worker.scratch) = sum;
    worker.barrier();
  };
  what_ = &work;
  start(n_);
}

void Pool::watch_neighbours(int n_tokens) {
  const int64_t limit = n_tokens <= FEW_TOKENS ? STALL_US : LONG_STALL_US;
  // A thread that had to be woken is late by itself; that says nothing of neighbours.
  const bool stalled = active_ > 1 && !woke_ && shared_.longest_wait_us.load(std::memory_order_relaxed) > limit;
  stalls_ = stalled ? stalls_ + 4 : stalls_ > 0 ? stalls_ - 1 : 0;
  if (stalls_ == 0) tried_from_ = 0;
  if (stalls_ >= 8) {
    // A neighbour takes one core; if that was not all, there are far fewer cores than threads.
    most_ = tried_from_ ? tried_from_ : most_ == n_ ? active_ - 1 : active_ / 2;
    if (most_ < 1) most_ = 1;
    stalls_ = tried_from_ = 0;
    pause_us_ = pause_us_ == 0 ? FIRST_PAUSE_US : pause_us_ * 2;
    if (pause_us_ > LONGEST_PAUSE_US) pause_us_ = LONGEST_PAUSE_US;
    retry_us_ = now_us() + pause_us_;
  } else if (most_ < n_ && now_us() >= retry_us_) {
    tried_from_ = most_;
    most_ = most_ * 2 < n_ ? most_ * 2 : n_;
    stalls_ = 4;  // the first stall of the try ends it
    retry_us_ = now_us() + FIRST_PAUSE_US;
  } else if (most_ == n_ && stalls_ == 0) {
    pause_us_ = 0;
  }
}

}  // namespace llmr
