// The environment: fetch a key and take it to the door, on a grid. Replace this file to host your own.
// It knows nothing of gRPC, and its state is plain data, so that to fork is to copy.
#pragma once

#include <array>
#include <cstdint>
#include <cstdlib>
#include <string>

// SplitMix64 (Steele, Lea, Flood 2014): the same numbers on every machine.
inline std::uint64_t mix(std::uint64_t value) {
  value += 0x9E3779B97F4A7C15;
  value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9;
  value = (value ^ (value >> 27)) * 0x94D049BB133111EB;
  return value ^ (value >> 31);
}

struct Random {
  std::uint64_t state;
  int below(int bound) { return static_cast<int>(mix(state++) % static_cast<std::uint64_t>(bound)); }
};

class KeyDoor {
 public:
  static constexpr const char* kSpec = R"(
    id: "key_door-v1" version: "1.0.0" title: "Key and door"
    instructions: "Fetch the key and take it to the door. You are told which of them to find next and how far away it "
                  "is. One move in ten slips and goes in a direction of chance."
    action_space { names: "Left" names: "Down" names: "Right" names: "Up" }
    options_schema_json: '{"type": "object", "properties": {}, "additionalProperties": false}'
    render_modes: "text" limits { max_turns: 30 max_actions_per_turn: 5 } concurrency: CONCURRENCY_CLASS_INLINE
    capabilities { fork: true deterministic: true expert_action: true valid_actions: true state_key: true }
  )";
  struct Result {
    bool effective, solved;
    double reward;
  };

  // `seed` alone makes the start, `dynamics_seed` alone the slips.
  KeyDoor(std::uint64_t seed, std::uint64_t dynamics_seed) {
    Random random{mix(seed)};
    for (auto* place : {&agent_, &key_, &door_})
      do *place = {random.below(kSize), random.below(kSize)};
      while ((place != &agent_ && *place == agent_) || (place == &door_ && door_ == key_));
    reseed(dynamics_seed);
  }
  void reseed(std::uint64_t dynamics_seed) { luck_ = {mix(dynamics_seed)}; }

  Result step(int action) {
    if (!luck_.below(10)) action = luck_.below(4);
    if (!allows(action)) return {false, false, 0.0};
    agent_ = beside(action);
    const bool found = !has_key_ && agent_ == key_, solved = has_key_ && agent_ == door_;
    has_key_ = has_key_ || found;
    return {true, solved, solved ? 1.0 : found ? 0.25 : 0.0};
  }

  std::string observation() const {  // "key Right 1 Down 2": always as many words
    const int dx = away(0), dy = away(1);
    return std::string(has_key_ ? "door" : "key") + (dx < 0 ? " Left " : dx ? " Right " : " - ") +
           std::to_string(std::abs(dx)) + (dy < 0 ? " Up " : dy ? " Down " : " - ") + std::to_string(std::abs(dy));
  }
  bool allows(int action) const {
    const int to = beside(action)[action % 2];
    return to >= 0 && to < kSize;
  }
  int expert_action() const { return away(0) ? (away(0) < 0 ? 0 : 2) : (away(1) < 0 ? 3 : 1); }
  std::string state_key() const {  // without history and luck; each number fits a byte, so these need no digest
    std::string key(1, static_cast<char>(has_key_));
    for (const auto& place : {agent_, key_, door_}) key += {static_cast<char>(place[0]), static_cast<char>(place[1])};
    return key;
  }

 private:
  using Place = std::array<int, 2>;  // x and y, from the upper left
  int away(int axis) const { return (has_key_ ? door_ : key_)[axis] - agent_[axis]; }
  Place beside(int action) const {
    Place to = agent_;
    to[action % 2] += action == 1 || action == 2 ? 1 : -1;
    return to;
  }

  static constexpr int kSize = 5;
  Place agent_, key_, door_;
  bool has_key_ = false;
  Random luck_;
};
