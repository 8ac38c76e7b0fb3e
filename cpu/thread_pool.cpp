#include "thread_pool.h"

#include <pthread.h>
#include <sched.h>
#include <signal.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <mutex>
#include <new>
#include <system_error>
#include <thread>
#include <vector>

#include "rlk/base.h"

namespace rlk::cpu {
namespace {

thread_local bool inside_parallel_for = false;

struct Job {
  Job(detail::Range range, void* context, std::int64_t n, std::int64_t grain)
      : range(range), context(context), n(n), grain(grain) {}

  const detail::Range range;
  void* const context;
  const std::int64_t n, grain;
  std::atomic<std::int64_t> next{0};
  std::atomic<int> helpers{0};  // workers inside work(); rises only under the pool's mutex
  std::mutex error_mutex;
  std::exception_ptr error;

  bool has_work() const { return next.load(std::memory_order_relaxed) < n; }

  void work() {
    const bool was_inside = inside_parallel_for;
    inside_parallel_for = true;
    try {
      for (std::int64_t begin; (begin = next.fetch_add(grain, std::memory_order_relaxed)) < n;)
        range(context, begin, std::min(begin + grain, n));
    } catch (...) {
      next.store(n, std::memory_order_relaxed);
      const std::lock_guard lock(error_mutex);
      if (!error) error = std::current_exception();
    }
    inside_parallel_for = was_inside;
  }
};

void pause_cpu() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

class Pool {
 public:
  explicit Pool(int workers) {
    // Workers block all signals: signals belong to the application, whose handlers must not run in a worker.
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    try {
      for (int i = 0; i < workers; ++i) threads_.emplace_back([this] { serve(); });
    } catch (const std::system_error&) {
      // The process is out of threads; the threads that started and the caller do the work.
    }
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
  }

  ~Pool() {
    {
      const std::lock_guard lock(mutex_);
      stop_ = true;
    }
    wake_.notify_all();
    for (std::thread& thread : threads_) thread.join();
  }

  void run(Job& job) {
    {
      const std::lock_guard lock(mutex_);
      jobs_.push_back(&job);
      pushed_.fetch_add(1, std::memory_order_relaxed);
    }
    const std::int64_t others = (job.n + job.grain - 1) / job.grain - 1;
    if (others >= static_cast<std::int64_t>(threads_.size())) {
      wake_.notify_all();
    } else {
      for (std::int64_t i = 0; i < others; ++i) wake_.notify_one();
    }
    job.work();
    {
      const std::lock_guard lock(mutex_);
      jobs_.erase(std::find(jobs_.begin(), jobs_.end(), &job));
    }
    // Ranges have about equal length, so the last helper (a worker inside work()) usually ends within moments. Spinning
    // is then cheaper than a sleep.
    using Clock = std::chrono::steady_clock;
    for (const auto limit = Clock::now() + std::chrono::microseconds(5);
         job.helpers.load(std::memory_order_acquire) != 0 && Clock::now() < limit;)
      pause_cpu();
    std::unique_lock lock(mutex_);  // taken even if no helper is left, since the last helper may still use the job
                                    // under the mutex
    done_.wait(lock, [&] { return job.helpers.load(std::memory_order_acquire) == 0; });
  }

 private:
  Job* job_with_work() const {
    const auto found = std::find_if(jobs_.begin(), jobs_.end(), [](const Job* j) { return j->has_work(); });
    return found == jobs_.end() ? nullptr : *found;
  }

  // The next job often follows within moments, from the next pass or the next operator. So spinning is cheaper than a
  // sleep and a wake-up.
  void await_next(std::unique_lock<std::mutex>& lock) const {
    if (job_with_work() != nullptr || stop_) return;
    const std::uint32_t seen = pushed_.load(std::memory_order_relaxed);
    lock.unlock();
    using Clock = std::chrono::steady_clock;
    for (const auto limit = Clock::now() + std::chrono::microseconds(30);
         pushed_.load(std::memory_order_relaxed) == seen && Clock::now() < limit;)
      pause_cpu();
    lock.lock();
  }

  void serve() {
    std::unique_lock lock(mutex_);
    for (;;) {
      Job* job = nullptr;
      wake_.wait(lock, [&] {
        job = job_with_work();
        return job != nullptr || stop_;
      });
      if (job == nullptr) return;
      job->helpers.fetch_add(1, std::memory_order_relaxed);
      lock.unlock();
      job->work();
      lock.lock();
      if (job->helpers.fetch_sub(1, std::memory_order_acq_rel) == 1) done_.notify_all();
      await_next(lock);
    }
  }

  std::mutex mutex_;
  std::condition_variable wake_, done_;
  std::vector<Job*> jobs_;
  std::atomic<std::uint32_t> pushed_{0};  // number of jobs so far; rises only under the mutex
  std::vector<std::thread> threads_;
  bool stop_ = false;
};

int allowed_cpus() {
#if defined(__linux__)
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof set, &set) == 0) return std::max(1, CPU_COUNT(&set));
#endif
  return std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
}

struct State {
  std::mutex mutex;
  std::atomic<int> threads{allowed_cpus()};
  // Behind a pointer, because a forked child must forget the pool without running its destructor.
  std::shared_ptr<Pool>* pool = nullptr;
};

State* the_state = nullptr;

// Never destroyed: threads of the application may still compute while static destructors run.
State& state() {
  static State* const s = [] {
    the_state = new State;
    pthread_atfork([] { the_state->mutex.lock(); }, [] { the_state->mutex.unlock(); },
                   [] {
                     new (&the_state->mutex) std::mutex;
                     the_state->pool = nullptr;
                   });
    return the_state;
  }();
  return *s;
}

}  // namespace

int num_threads() { return state().threads.load(std::memory_order_relaxed); }

void set_num_threads(int n) {
  RLK_CHECK(n >= 1 && n <= kMostThreads, "the number of threads lies between 1 and 1024");
  State& s = state();
  std::shared_ptr<Pool>* old = nullptr;
  {
    const std::lock_guard lock(s.mutex);
    if (s.threads.load(std::memory_order_relaxed) == n) return;
    s.threads.store(n, std::memory_order_relaxed);
    std::swap(old, s.pool);
  }
  delete old;  // joins the workers, unless a call still uses them; that call then joins them
}

void detail::parallel_for(std::int64_t n, std::int64_t grain, Range range, void* context) {
  if (n <= 0) return;
  grain = std::max<std::int64_t>(grain, 1);
  if (n <= grain || inside_parallel_for || num_threads() == 1) return range(context, 0, n);
  State& s = state();
  std::shared_ptr<Pool> pool;
  {
    const std::lock_guard lock(s.mutex);
    if (s.pool == nullptr)
      s.pool = new std::shared_ptr<Pool>(std::make_shared<Pool>(s.threads.load(std::memory_order_relaxed) - 1));
    pool = *s.pool;
  }
  Job job(range, context, n, grain);
  pool->run(job);
  if (job.error) std::rethrow_exception(job.error);
}

}  // namespace rlk::cpu
