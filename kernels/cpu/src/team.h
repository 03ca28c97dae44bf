// Threads of one call. Work is handed out in chunks from a shared counter, not split evenly: other processes run on the
// same cores, and a thread that loses its core for a while must not hold up the rest.
//
// OpenMP, from the library torch already loaded: both share one pool, so there is never a second set of threads
// spinning on the same cores.
#pragma once

#include <omp.h>
#include <sched.h>

#include <atomic>
#include <cstdint>

#if defined(__AMX_TILE__)
#include <immintrin.h>
#endif

namespace headrace {

// Counters are used in turn, one a phase. Phases follow each other by a barrier, so two would do.
constexpr int COUNTERS = 4;
constexpr int SPINS = 2000;

// What the threads of one call share.
struct Shared {
  struct alignas(64) Counter {
    std::atomic<int64_t> next{0};
  };
  Counter counters[COUNTERS];
  alignas(64) std::atomic<int> arrived{0};
  alignas(64) std::atomic<int> generation{0};
};

inline void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

#if defined(__AMX_TILE__)
// Palette 1, all eight tiles 16 rows of 64 bytes: operands are padded to that. A constant, because GCC does not know
// that loading it reads more than its first bytes, and would drop stores to a local.
struct alignas(64) TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[8] = {64, 64, 64, 64, 64, 64, 64, 64}, reserved_bytes[8] = {};
  uint8_t rows[8] = {16, 16, 16, 16, 16, 16, 16, 16}, reserved_rows[8] = {};
};
inline constexpr TileConfig TILE_CONFIG;
#endif

// State of a thread inside a parallel call: tiles configured, and denormals flushed by vectors as they are by tiles, so
// that it does not show which of them computed something.
class Numerics {
 public:
#if defined(__AMX_TILE__)
  Numerics() : control_(_mm_getcsr()) {
    constexpr unsigned FLUSH = 0x8040;
    _mm_setcsr(control_ | FLUSH);
    _tile_loadconfig(&TILE_CONFIG);
  }
  ~Numerics() {
    _tile_release();
    _mm_setcsr(control_);
  }

 private:
  const unsigned control_;
#else
  Numerics() {}
  ~Numerics() {}
#endif
};

// One thread's view of a parallel call; all threads must go through the same phases.
class Team {
 public:
  Team(int rank, int size, Shared& shared) : rank(rank), size(size), shared_(shared) {}

  // f(i) for every i in [0, count), spread over the team; returns when all are done.
  template <class F>
  void each(int64_t count, int64_t chunk, F&& f) {
    std::atomic<int64_t>& next = shared_.counters[phase_++ % COUNTERS].next;
    for (;;) {
      int64_t begin = next.fetch_add(chunk, std::memory_order_relaxed);
      if (begin >= count) break;
      int64_t end = begin + chunk < count ? begin + chunk : count;
      for (int64_t i = begin; i < end; ++i) f(i);
    }
    barrier();
  }

  // Rows of equal, small work.
  template <class F>
  void each_row(int64_t count, F&& f) {
    each(count, 1 + count / (4 * size), f);
  }

  // Spins briefly, as phases are short; then gives the core away, as the missing thread may be waiting for one. OpenMP's
  // own barrier spins for milliseconds.
  void barrier() {
    if (size == 1) return clear_next();
    const int generation = shared_.generation.load(std::memory_order_acquire);
    if (shared_.arrived.fetch_add(1, std::memory_order_acq_rel) + 1 == size) {
      shared_.arrived.store(0, std::memory_order_relaxed);
      clear_next();
      shared_.generation.store(generation + 1, std::memory_order_release);
      return;
    }
    for (int spin = 0; shared_.generation.load(std::memory_order_acquire) == generation; ++spin) {
      if (spin < SPINS) {
        pause();
      } else {
        sched_yield();
      }
    }
  }

  const int rank;
  const int size;

 private:
  // The counter of the phase after the next: all have left the one that used it before.
  void clear_next() { shared_.counters[(phase_ + 1) % COUNTERS].next.store(0, std::memory_order_relaxed); }

  Shared& shared_;
  int phase_ = 0;
};

template <class F>
void parallel(int threads, F&& body) {
  Shared shared;
  if (threads <= 1) {
    const Numerics numerics;
    body(Team(0, 1, shared));
    return;
  }
#pragma omp parallel num_threads(threads)
  {
    const Numerics numerics;
    // The runtime may grant fewer threads than asked for.
    body(Team(omp_get_thread_num(), omp_get_num_threads(), shared));
  }
}

}  // namespace headrace
