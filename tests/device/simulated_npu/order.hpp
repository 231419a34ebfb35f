// The order that streams, events and collectives give to work, as vector clocks. Work of one stream comes after work of
// another only if somebody waited: the stream for an event, or the host. Two uses of the same bytes without such an
// order, one of them a write, are an error here, on every run; on a device they are a race that mostly goes well.
#pragma once
#include <c10/util/Exception.h>

#include <algorithm>
#include <map>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

namespace sim {

struct Clock : std::map<int64_t, int64_t> {  // by stream, how much of its work is done
  bool covers(int64_t stream, int64_t time) const {
    auto found = find(stream);
    return found != end() && found->second >= time;
  }
  void join(const Clock& other) {
    for (auto [stream, time] : other) {
      auto& mine = (*this)[stream];
      mine = std::max(mine, time);
    }
  }
};

struct Range {  // bytes of a block
  size_t block, begin, end;
};

struct Access {
  size_t begin, end;
  int64_t stream, time;
  bool write;
  std::string name;
};

struct Order {
  std::mutex lock;
  std::map<int64_t, Clock> streams;  // what the next work of each stream comes after
  Clock host;                        // what the host has waited for: everything that it calls comes after
  std::unordered_map<size_t, std::vector<Access>> accesses;

  // Work of a stream that reads and writes these bytes; its time.
  int64_t work(int64_t stream, const std::string& name, const std::vector<Range>& reads,
               const std::vector<Range>& writes) {
    std::lock_guard<std::mutex> held(lock);
    auto& clock = streams[stream];
    clock.join(host);
    auto time = ++clock[stream];
    for (auto& range : reads) use(range, false, stream, name);
    for (auto& range : writes) use(range, true, stream, name);
    return time;
  }
  void use(const Range& range, bool write, int64_t stream, const std::string& name) {
    auto& clock = streams[stream];
    auto& known = accesses[range.block];
    for (auto& one : known) {
      bool same = one.begin < range.end && range.begin < one.end && (write || one.write);
      TORCH_CHECK(!same || clock.covers(one.stream, one.time), "missing wait: ", name, write ? " writes" : " reads",
                  " memory that ", one.name, one.write ? " writes" : " reads", " in another stream");
    }
    std::erase_if(known, [&](const Access& one) {
      bool within = range.begin <= one.begin && one.end <= range.end;
      return host.covers(one.stream, one.time) || (within && (write || (!one.write && one.stream == stream)));
    });
    known.push_back({range.begin, range.end, stream, clock[stream], write, name});
  }
  Clock now(int64_t stream) {
    std::lock_guard<std::mutex> held(lock);
    auto found = streams[stream];
    found.join(host);
    return found;
  }
  void stream_waits(int64_t stream, const Clock& clock) {
    std::lock_guard<std::mutex> held(lock);
    streams[stream].join(clock);
  }
  void host_waits(const Clock& clock) {
    std::lock_guard<std::mutex> held(lock);
    host.join(clock);
  }
  bool is_done(int64_t stream, int64_t time) {
    std::lock_guard<std::mutex> held(lock);
    return host.covers(stream, time);
  }
  Clock everything(int64_t first, int64_t last) {  // of these streams
    std::lock_guard<std::mutex> held(lock);
    Clock found;
    for (auto one = streams.lower_bound(first); one != streams.end() && one->first <= last; ++one)
      found.join(one->second);
    return found;
  }
  void forget(size_t block, int64_t stream) {  // an allocator waits for it before it uses the block again
    std::lock_guard<std::mutex> held(lock);
    std::erase_if(accesses[block], [&](const Access& one) { return one.stream == stream; });
  }
};

inline Order& order() {
  static auto* found = new Order;
  return *found;
}

}  // namespace sim
